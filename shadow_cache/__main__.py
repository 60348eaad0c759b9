"""``python -m compiled_autograd.shadow_cache``: the command line."""

from .cli import main

if __name__ == "__main__":
    main()
