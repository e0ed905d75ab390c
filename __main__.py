"""`python -m dflash_deploy`: the same as the `dflash` command."""

from __future__ import annotations

from dflash_deploy.cli import main

if __name__ == "__main__":
    main()
