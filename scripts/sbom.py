"""Write what an installed lmsrun consists of as a CycloneDX bill of materials: ``sbom.py [FILE]``.

It lists lmsrun and every distribution that it needs, as installed in the Python that runs this script.
"""

import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

try:
    from cyclonedx.contrib.license.factories import LicenseFactory
    from cyclonedx.model.bom import Bom
    from cyclonedx.model.component import Component, ComponentType
    from cyclonedx.output.json import JsonV1Dot6
    from packageurl import PackageURL
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name
except ImportError as error:
    sys.exit(
        f"sbom: {error.name} is not installed here; try: make setup, and .venv/bin/python scripts/sbom.py"
    )

PROJECT = "lmsrun"


def requirements(installed: Distribution) -> list[str]:
    """Names of what a distribution needs here, without its extras."""
    wanted = (Requirement(text) for text in installed.requires or ())
    return [
        canonicalize_name(one.name)
        for one in wanted
        if one.marker is None or one.marker.evaluate({"extra": ""})
    ]


def licences(installed: Distribution) -> list[str]:
    """Find what a distribution says of its licence: an expression, one line, or its classifiers."""
    told = installed.metadata.json
    text = str(told.get("license_expression") or told.get("license") or "")
    found = [text] if text and "\n" not in text else told.get("classifier") or []
    return [
        line.rpartition(" :: ")[2] for line in found if line == text or "License :: OSI Approved ::" in line
    ]


def describe(name: str, kind: ComponentType) -> tuple[Component, Distribution]:
    """One distribution as a component, with its licence as it states it."""
    try:
        installed = distribution(name)
    except PackageNotFoundError:
        raise SystemExit(f"sbom: {name} is not installed in {sys.prefix}; try: pip install {name}") from None
    component = Component(
        name=name,
        version=installed.version,
        type=kind,
        description=str(installed.metadata.json.get("summary", "")),
        bom_ref=f"{name}@{installed.version}",
        purl=PackageURL("pypi", None, name, installed.version),
        licenses=[LicenseFactory().make_from_string(text) for text in licences(installed)],
    )
    return component, installed


def build_bom() -> Bom:
    """Walk the requirements of lmsrun, breadth first."""
    root, installed = describe(PROJECT, ComponentType.APPLICATION)
    bom = Bom()
    bom.metadata.component = root
    known = {PROJECT: root}
    waiting = [(root, installed)]
    while waiting:
        component, installed = waiting.pop(0)
        needed = []
        for name in requirements(installed):
            if name not in known:
                known[name], found = describe(name, ComponentType.LIBRARY)
                bom.components.add(known[name])
                waiting.append((known[name], found))
            needed.append(known[name])
        bom.register_dependency(component, needed)
    return bom


def main(argv: list[str]) -> int:
    """Print the document, or write it to the file that is named."""
    text = JsonV1Dot6(build_bom()).output_as_string(indent=2)
    if argv:
        Path(argv[0]).write_text(text + "\n", encoding="utf-8")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
