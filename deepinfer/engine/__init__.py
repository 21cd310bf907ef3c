"""One replica: requests in, tokens out. Read request.py, then scheduler.py, loop.py, sampler.py, process.py."""
