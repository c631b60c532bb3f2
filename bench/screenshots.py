"""`python -m bench.screenshots`: start a fleet under load, picture every page, stop it.

All pictures go to `--all FOLDER` if given; the fleet page's two, wide, become those of the README.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.fleet_run import fleet_up

CODE = Path(__file__).resolve().parents[1]
WARM_UP_SECONDS = 75.0
"""The windows of the figures are a minute long; before that they only grow."""


def main() -> None:
    """Take them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--replicas", type=int, default=3, help="on each node")
    parser.add_argument("--all", type=Path, help="keep every picture in this folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="exaops-pictures-") as folder:
        pictures = options.all or Path(folder) / "pictures"
        shape = ("--nodes", str(options.nodes), "--replicas", str(options.replicas))
        with fleet_up(CODE, Path(folder) / "var", *shape, "--load") as run:
            summary = run.summary()
            time.sleep(WARM_UP_SECONDS)
            command = [sys.executable, "manage.py", "screenshots", "--url", summary["web_url"]]
            subprocess.run(
                [*command, "--user", summary["admin_user"], "--out", str(pictures.absolute())],
                cwd=CODE,
                env=os.environ | {"EXAOPS_SCREENSHOT_PASSWORD": summary["admin_password"]},
                check=True,
            )
        target = CODE / "docs" / "img"
        target.mkdir(exist_ok=True)
        for theme in ("light", "dark"):
            shutil.copy(pictures / f"fleet-wide-{theme}.png", target / f"fleet-{theme}.png")
            print(target / f"fleet-{theme}.png")


if __name__ == "__main__":
    main()
