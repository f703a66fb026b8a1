"""Write a wheel's bill of materials (PEP 770), as JSON of CycloneDX 1.6; `tools/dist.py` runs it for each wheel.

::

    python tools/sbom.py zcactor.egg-info/PKG-INFO zcactor.cdx.json     # with the packages of the group dist

A wheel holds no code of others but inline functions of the headers of Python and NumPy: the modules in
``zcactor/rpc/_fbs`` are generated from the schema here. So the other components are the dependencies of the metadata,
those of extras as optional ones. Pip chooses their releases, so each has requirements (``python:requires-dist``) in
place of a version. The date is ``SOURCE_DATE_EPOCH``, and nothing is random.
"""

from __future__ import annotations

import os
import sys
from datetime import UTC, datetime
from email import message_from_bytes
from pathlib import Path

__all__ = ["main"]


def main(words: list[str]) -> None:
    """Write the bill of materials for the metadata in one file to another file.

    Args:
        words: the two files.

    Raises:
        SystemExit: a package that writes it is missing, or the schema of CycloneDX refuses it.
    """
    try:
        from cyclonedx.model import Property
        from cyclonedx.model.bom import Bom
        from cyclonedx.model.component import Component, ComponentScope, ComponentType
        from cyclonedx.model.license import LicenseExpression
        from cyclonedx.output.json import JsonV1Dot6
        from cyclonedx.schema import SchemaVersion
        from cyclonedx.validation.json import JsonStrictValidator
        from packageurl import PackageURL
        from packaging.requirements import Requirement
    except ImportError as error:
        raise SystemExit(f"sbom: {error.name} is missing: pip install --group dist") from None

    metadata = message_from_bytes(Path(words[0]).read_bytes())
    name, version = metadata["Name"], metadata["Version"]
    wheel = Component(
        name=name, version=version, type=ComponentType.LIBRARY, bom_ref=name, description=metadata["Summary"],
        purl=PackageURL("pypi", None, name, version), licenses=[LicenseExpression(metadata["License-Expression"])],
    )  # fmt: skip
    wanted: dict[str, list[str]] = {}
    for line in metadata.get_all("Requires-Dist", []):
        wanted.setdefault(Requirement(line).name, []).append(line)
    wanted.pop(name, None)  # the extra `all` names others
    bom = Bom(components=[
        Component(
            name=each, type=ComponentType.LIBRARY, bom_ref=each, purl=PackageURL("pypi", None, each),
            scope=ComponentScope.OPTIONAL if all("extra ==" in line for line in lines) else ComponentScope.REQUIRED,
            properties=[Property(name="python:requires-dist", value=line) for line in lines],
        )
        for each, lines in wanted.items()
    ])  # fmt: skip
    bom.metadata.component = wheel
    bom.metadata.timestamp = datetime.fromtimestamp(int(os.environ["SOURCE_DATE_EPOCH"]), UTC)
    bom.serial_number = None  # it is random otherwise
    bom.register_dependency(wheel, bom.components)
    text = JsonV1Dot6(bom).output_as_string(indent=1)
    if fault := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        raise SystemExit(f"sbom: the schema of CycloneDX refuses the bill of materials: {fault}")
    Path(words[1]).parent.mkdir(parents=True, exist_ok=True)
    Path(words[1]).write_text(f"{text}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
