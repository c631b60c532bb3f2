"""A node without a package index: an environment of its own, out of wheels that were sent along."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

from exaserve_ops.adapters.ssh_connection import fetch_host_key
from exaserve_ops.adapters.ssh_site import SiteSettings, SshSites
from exaserve_ops.inventory.domain.installation import Credentials, Target
from exaserve_ops.lib import clock
from tests.fakes.sshd import USER, SshServer


def make_tree(folder: Path) -> Path:
    """An agent that needs one package, which no index has."""
    package = folder / "workers/agent"
    package.mkdir(parents=True)
    (folder / "workers/__init__.py").touch()
    (package / "__init__.py").write_text('AGENT_VERSION = "9.9"\n')
    (package / "cli.py").write_text("import exaops_test_dependency\n")
    (folder / "requirements-agent.txt").write_text("exaops-test-dependency==1.0\n")
    return folder


def make_wheelhouse(folder: Path) -> Path:
    folder.mkdir()
    info = "exaops_test_dependency-1.0.dist-info"
    with zipfile.ZipFile(folder / "exaops_test_dependency-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("exaops_test_dependency.py", "")
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: exaops-test-dependency\nVersion: 1.0\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return folder


def test_environment_is_made_of_the_wheels_alone_and_made_once(server: SshServer, tmp_path: Path) -> None:
    settings = SiteSettings(
        control_url="http://127.0.0.1:1",
        redis_url="redis://127.0.0.1:1/0",
        tree=make_tree(tmp_path / "tree"),
        wheelhouse=make_wheelhouse(tmp_path / "wheels"),
        free_disk_bytes=1,
    )
    pin = fetch_host_key(server.host, server.port, ())
    # Absolute, since a virtual environment's own interpreter makes environments too.
    target = Target("i", server.host, server.port, USER, str(tmp_path / "node"), "", (pin,))
    log: list[str] = []
    credentials = Credentials(private_key=server.private_key)
    with SshSites(settings, clock.now).open(target, credentials, log.append) as site:
        site.facts |= {"python": sys.executable, "python_version": "3.x"}
        site.facts |= site.make_folder().facts
        first = site.push_bundle()
        assert first.summary.endswith(", 1 wheels sent")
        site.facts |= first.facts
        made = site.make_environment()
        assert made.facts["interpreter"].startswith(str(tmp_path / "node/venvs"))
        assert "Successfully installed exaops-test-dependency-1.0" in "".join(log)
        again = site.push_bundle()
        assert again.summary == f"version {site.facts['version']} is there already"
        log.clear()
        assert site.make_environment().facts == made.facts
        assert "already there" in "".join(log)
