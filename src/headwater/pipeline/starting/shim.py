"""A JAVA_HOME for Spark's own scripts, where the runtime lacks a module that they always ask for.

Only MLlib's linear algebra uses the module, and it does without. The shim serves whatever `spark-class` starts:
drivers, masters, workers and executors.
"""

from __future__ import annotations

import hashlib
import shlex
from pathlib import Path

from headwater.pipeline.starting.cache import cache_folder, private_folder, write_whole
from headwater.pipeline.starting.java import VECTOR_MODULE, Java, has_vector_module

_SCRIPT = f"""#!/bin/sh
# Made by Headwater: the same java, without asking for a module that this runtime does not have.
for word do
  shift
  [ "$word" = "--add-modules={VECTOR_MODULE}" ] || set -- "$@" "$word"
done
exec %s "$@"
"""


def spark_java_home(java: Java, folder: Path | None = None) -> Path:
    """The JAVA_HOME to hand to Spark: the Java's own, or a shim's (kept in the cache folder, or in `folder`)."""
    if has_vector_module(java):
        return java.home
    if folder is None:
        folder = cache_folder() / "java"
    home = folder / hashlib.sha256(str(java.home).encode()).hexdigest()[:16]
    launcher = private_folder(home / "bin") / "java"
    script = _SCRIPT % shlex.quote(str(java.executable))
    if not launcher.exists() or launcher.read_text(encoding="utf-8") != script:
        write_whole(launcher, script, 0o700)
    return home
