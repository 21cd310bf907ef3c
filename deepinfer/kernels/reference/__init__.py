"""Plain PyTorch, the definition of right: every faster kernel is compared with the function of the same name here."""
