"""`python -m inspect_lens._cli`, which is `inspect-lens`."""

from ._main import main

if __name__ == "__main__":
    main()
