"""Reads the installed versions of CANN and the driver from the version files of Huawei's installers.

* toolkit: `<toolkit>/<arch>-linux/ascend_toolkit_install.info` with `version=8.3.RC1`, or `<toolkit>/version.cfg` with
  `toolkit_running_version=[7.8.0.1.231:8.3.RC1]`; `set_env.sh` names the toolkit in ASCEND_HOME_PATH;
* its attention operators: `<toolkit>/<arch>-linux/include/version/ops_transformer_version.h` with the time when they
  were built (CANN 9.0 and later);
* driver: `/usr/local/Ascend/driver/version.info` with `package_version=25.3.rc1` (older ones: `Version=`);
  `/etc/ascend_install.info` names another folder (`Driver_Install_Path_Param=/opt/Ascend`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

HOME_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
TOOLKITS = ("usr/local/Ascend/ascend-toolkit/latest", "usr/local/Ascend/cann")
DRIVER_FOLDER = "usr/local/Ascend/driver"


def read(path: Path) -> str:
    """The file's text; empty if it is missing or cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def value(text: str, key: str, separator: str = "=") -> str:
    """The value of a line `key = value`; empty if there is none."""
    match = re.search(rf"^\s*{re.escape(key)}\s*{separator}\s*(\S+)\s*$", text, re.M | re.I)
    return match[1] if match else ""


def toolkit_version(toolkit: Path) -> str:
    """The version that the installer wrote; empty if this is no toolkit."""
    for info in (*sorted(toolkit.glob("*-linux/ascend_toolkit_install.info")), toolkit / "ascend_toolkit_install.info"):
        if version := value(read(info), "version"):
            return version
    text = read(toolkit / "version.cfg")
    match = re.search(r"^toolkit_(?:running|installed)_version=\[[^:\]]*:([^\]\s]+)\]", text, re.M)
    return match[1] if match else ""


@dataclass(frozen=True)
class Version:
    """A version of CANN: 8.3.RC1.alpha003 is (8, 3), "RC1", "alpha003"."""

    series: tuple[int, int]
    release: str  # "RC1", "0" of 8.5.0, "" when the text ends after the series
    suffix: str

    @property
    def prerelease(self) -> bool:
        return re.search(r"alpha|beta", self.suffix, re.I) is not None


def parse(text: str) -> Version | None:
    match = re.fullmatch(r"(\d+)\.(\d+)(?:\.(RC\d+|\d+))?(?:[.\-](.+))?", text.strip(), re.I)
    if match is None:
        return None
    return Version((int(match[1]), int(match[2])), (match[3] or "").upper(), match[4] or "")


def series(text: str) -> tuple[int, int] | None:
    """(8, 3) of "8.3.RC1"; None if the text is no version."""
    version = parse(text)
    return version.series if version else None


def built(toolkit: Path) -> str:
    """The build day of the attention operators, such as 20260721; "" if unknown."""
    for header in sorted(toolkit.glob("*-linux/include/version/ops_transformer_version.h")):
        if match := re.search(r"OPS_TRANSFORMER_TIMESTAMP\D+(\d{8})", read(header)):
            return match[1]
    return ""


# A nightly build has the name of the coming release; only its operators carry the day.
WRONG_NIGHTLIES = ("20260325", "20260330")


def defect(text: str, day: str = "") -> str | None:
    """The known silent error in this build of CANN; None if there is none. day: its build day."""
    version = parse(text)
    if WRONG_NIGHTLIES[0] <= day <= WRONG_NIGHTLIES[1]:
        wrong = "attention with a window and sinks is wrong (ops-transformer c36036e63, fixed in 2687bb676)"
        return f"a nightly build of {day}: from 25 to 30 March 2026 {wrong}"
    if version is not None and version.series == (9, 1) and version.prerelease:
        return "a beta: betas of 9.1 lose columns in products of fewer than 64 rows (ops-nn e3f831f65)"
    return None


def find_toolkit(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> tuple[Path | None, str | None]:
    """The toolkit, and the variable that names it: None if the toolkit was found in a usual place."""
    for name in HOME_VARIABLES:
        if environ.get(name):
            return Path(environ[name]), name
    home = environ.get("HOME", "")
    places = [root / place for place in TOOLKITS]
    if home:
        places += [Path(home) / "Ascend/ascend-toolkit/latest", Path(home) / "Ascend/cann"]
    return next((place for place in places if toolkit_version(place)), None), None


def driver_folder(root: Path = Path("/")) -> Path:
    """The driver's folder. In a container it may lie in the usual place, whatever the host's file says."""
    named = value(read(root / "etc/ascend_install.info"), "Driver_Install_Path_Param")
    folder = root / named.lstrip("/") / "driver"
    return folder if named and folder.is_dir() else root / DRIVER_FOLDER


def driver_version(root: Path = Path("/")) -> str:
    """The driver's version; empty if no version file has one."""
    info = read(driver_folder(root) / "version.info")
    return value(info, "package_version") or value(info, "Version")
