"""The bill of materials of artifacts: what they were compiled with and from, as CycloneDX JSON.

Wheels hold it in their metadata's folder `sboms`, where PEP 770 puts it. It has neither a time nor
a random number: the same artifacts have the same one.
"""

from __future__ import annotations

import json
import re
import urllib.parse
from typing import Any

from ..artifacts.manifest import Manifest

FILE_NAME = "artifacts.cdx.json"
# Who holds the rights in the compiler, and what its licence is called.
_COMPILER_LICENCE = {"license": {"name": "NVIDIA Software License Agreement"}}


def artifacts_sbom(manifest: Manifest, name: str, version: str) -> bytes:
    """The file for artifacts that the wheel `name` holds."""
    wheel = _pypi(name, version, "application")
    compiler = [
        {**_pypi(package, found, "application"), "licenses": [_COMPILER_LICENCE]}
        for package, found in sorted(manifest.compiler.items())
    ]
    tool = _pypi("sonata-aot", manifest.tool, "application")
    inputs = [*compiler] if tool == wheel else [*compiler, tool]
    kernels = {
        "type": "file",
        "bom-ref": f"kernels:{manifest.source.digest}",
        "name": "kernel sources",
        "description": ", ".join(manifest.selection.kernels),
        "hashes": [{"alg": "SHA-256", "content": manifest.source.digest}],
        "properties": _properties(
            commit=manifest.source.commit,
            dirty=manifest.source.dirty,
            archs=" ".join(manifest.selection.archs),
        ),
    }
    components = [*inputs, kernels]
    content = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "lifecycles": [{"phase": "build"}],
            "component": wheel,
            "properties": _properties(manifest=manifest.digest, schema=manifest.schema),
        },
        "components": components,
        "dependencies": [
            {"ref": wheel["bom-ref"], "dependsOn": [item["bom-ref"] for item in components]}
        ],
    }
    return (json.dumps(content, indent=2) + "\n").encode()


def _pypi(name: str, version: str, kind: str) -> dict[str, Any]:
    # In the form that purl asks for: scanners compare it with what they know letter by letter.
    purl = f"pkg:pypi/{re.sub('[-_.]+', '-', name).lower()}@{urllib.parse.quote(version)}"
    return {"type": kind, "bom-ref": purl, "name": name, "version": version, "purl": purl}


def _properties(**values: object) -> list[dict[str, str]]:
    return [
        {"name": f"sonata-aot:{name}", "value": str(value).lower()}
        for name, value in values.items()
        if value is not None
    ]
