"""`python -m deepinfer` is the `deepinfer` command."""

from deepinfer.cli import main

if __name__ == "__main__":
    main()
