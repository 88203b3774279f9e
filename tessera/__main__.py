"""`python -m tessera` is `tessera`."""

from __future__ import annotations

from tessera.cli.main import main

if __name__ == "__main__":
    main()
