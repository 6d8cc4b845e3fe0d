"""Makes the metrics page of a whole cluster from the texts of its processes.

Lines are grouped by family without being parsed. prometheus_client wrote them all and escapes line ends, so each line
is complete. With its parser and writer instead, 16 replicas (15,000 lines, 740 kB) took 290 to 530 ms on a busy machine
where this takes 20 to 30 ms. No stream gets a token meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from controllers.histogram import Measure
from serving.watch.definitions import DEFINITIONS
from serving.watch.metrics import IngressMetrics
from serving.watch.registry import Figure


def cluster_page(
    own: IngressMetrics,
    replicas: Sequence[str],
    ingresses: Iterable[tuple[str, str]],
    measures: Iterable[Measure],
    *,
    controller_up: bool,
    present: int,
    expected: int,
) -> str:
    """The page of the front end with metrics `own`. It has the texts of the `replicas` that answered (`present` are
    running), the texts of other front ends by id, and the controller's `measures`. `controller_up`: all of its shards
    answered."""
    figures = [
        Figure("kedge_replicas_expected", expected),
        Figure("kedge_scrape_missing_replicas", max(0, present - len(replicas))),
        Figure("kedge_controller_up", controller_up),
        *controller_figures(measures),
    ]
    # A front end always shows at least its own figures.
    by_ingress = dict(ingresses) | {own.ingress_id: own.render()}
    return merge_expositions([*replicas, own.render_others(figures), *by_ingress.values()])


def merge_expositions(texts: Iterable[str]) -> str:
    """Merges several expositions into one: every family once, with the samples of all."""
    headers: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for text in texts:
        family = ""
        for line in text.split("\n"):
            if line.startswith(("# HELP ", "# TYPE ")):
                family = line.split(" ", 3)[2]
                lines = headers.setdefault(family, [])
                if not any(line[:7] == seen[:7] for seen in lines):
                    lines.append(line)
            elif line and not line.startswith("#"):
                samples.setdefault(family, []).append(line)
    blocks = ["\n".join([*headers.get(name, []), *lines]) for name, lines in samples.items()]
    return "\n".join(blocks) + "\n" if blocks else ""


def controller_figures(measures: Iterable[Measure]) -> Iterator[Figure]:
    """The measures that this version knows: the controller may be of a later version."""
    for measure in measures:
        name = f"kedge_{measure.name}"
        known = DEFINITIONS.get(name)
        if known is None or known.labels != tuple(label for label, _ in measure.labels):
            continue
        if len(measure.counts) == (len(known.buckets) + 1 if known.buckets else 0):
            yield Figure(name, measure.value, tuple(value for _, value in measure.labels), measure.counts)
