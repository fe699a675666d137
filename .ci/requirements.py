"""Print what vllm-graft needs at run time, and what that needs, as installed here."""

from importlib.metadata import distribution

from packaging.requirements import Requirement


def needed(name: str, found: dict[str, str]) -> None:
    """Add the distributions that one needs without its extras."""
    for text in distribution(name).requires or ():
        asked = Requirement(text)
        if asked.marker is None or asked.marker.evaluate({"extra": ""}):
            inner = distribution(asked.name)
            if inner.name not in found:
                found[inner.name] = inner.version
                needed(inner.name, found)


versions: dict[str, str] = {}
needed("vllm-graft", versions)
print("\n".join(f"{name}=={version}" for name, version in sorted(versions.items())))
