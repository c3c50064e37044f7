"""Compiles the stand-in: `python build.py FOLDER`, or `build(folder)`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).with_name("recording_libcuda.cpp")


def build(out_dir: Path, *, omit: Sequence[str] = ()) -> Path:
    """Compile `out_dir/libcuda.so.1`; `omit` names entry points that it shall lack."""
    out_dir.mkdir(parents=True, exist_ok=True)
    library = out_dir / "libcuda.so.1"
    compiler = os.environ.get("CXX", "c++").split()
    flags = ["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-fPIC", "-fvisibility=hidden"]
    link = ["-shared", "-pthread", "-Wl,-soname,libcuda.so.1"]
    if omit:
        hidden = out_dir / "omit.map"
        hidden.write_text("{ local: " + " ".join(f"{name};" for name in omit) + " };\n")
        link.append(f"-Wl,--version-script={hidden}")
    done = subprocess.run(
        [*compiler, *flags, *link, str(SOURCE), "-o", str(library)], capture_output=True, text=True
    )
    if done.returncode != 0:
        raise RuntimeError(f"the recording driver does not compile:\n{done.stderr}")
    return library


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
