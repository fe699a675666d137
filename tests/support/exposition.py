"""Numbers of a page in Prometheus' text format."""

from vllm_graft.metrics.server_info import samples


def total(text: str, name: str, **labels: str) -> float:
    """The sum of all samples of a name that have these labels; 0 if there is none."""
    return sum(
        sample.value
        for sample in samples(text, name)
        if sample.name == name and labels.items() <= sample.labels.items()
    )
