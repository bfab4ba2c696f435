"""Which Headwater this is, and how to install more of it."""

VERSION = "0.1.0"  # as in pyproject.toml
UPGRADE = "Upgrade Headwater here: pip install . in a newer checkout"


def missing_for_spark() -> str | None:
    """The first package of the extra `spark` that is not installed. Importing PySpark takes a second, so packages are
    only looked for."""
    import importlib.util

    wanted = ("pyspark", "pyarrow", "deltalake")
    return next((package for package in wanted if importlib.util.find_spec(package) is None), None)


def install_hint(*extras: str) -> str:
    """How to install what these extras need: from the directory that Headwater was installed from, if it is still
    there; otherwise each package by its name."""
    import importlib.metadata
    import json
    import os
    import re
    from urllib.parse import unquote

    try:
        headwater = importlib.metadata.distribution("headwater")
    except importlib.metadata.PackageNotFoundError:
        return f"In a checkout of Headwater: pip install '.[{','.join(extras)}]'"
    origin = json.loads(headwater.read_text("direct_url.json") or "{}").get("url", "")
    if origin.startswith("file://") and os.path.isdir(unquote(origin.removeprefix("file://"))):
        return f"pip install '{unquote(origin.removeprefix('file://'))}[{','.join(extras)}]'"
    packages: list[str] = []
    wanted = list(extras)
    for extra in wanted:
        for requirement in headwater.requires or ():
            package, _, marker = (part.strip() for part in requirement.partition(";"))
            if not re.search(rf"extra == ['\"]{extra}['\"]", marker):
                continue
            if within := re.fullmatch(r"headwater\[(.+)\]", package):
                wanted += [each for each in within[1].split(",") if each not in wanted]
            else:
                packages.append(f"'{package}'")
    return f"pip install {' '.join(packages)}"
