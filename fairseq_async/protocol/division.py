"""Which tensors each shard of a server has, and on which machine: the server and every worker compute the same."""

from collections.abc import Sequence

from fairseq_async.algorithms import Fragment, fragments_of
from fairseq_async.errors import RefusedError, option
from fairseq_async.method.spec import MethodSpec
from fairseq_async.protocol.layout import Layout


def divided(spec: MethodSpec, layout: Layout) -> list[tuple[Fragment, ...]]:
    """Divides each fragment in which the model is exchanged into shards, or fewer where it has fewer tensors; each
    shard counts tensors and elements from the beginning of its fragment.

    Raises:
        RefusedError: the model has fewer tensors than there are shards.
    """
    sizes, count = [segment.size for segment in layout.segments], spec.server.shards
    try:
        fragments_of(sizes, count)
    except ValueError as error:
        given = f"{option('server_shards')} makes {count} shards: {error}"
        raise RefusedError(given.replace("fragments", "shards")) from error
    of_each = [sizes[fragment.tensors] for fragment in layout.fragments(spec.fragments)]
    return [fragments_of(own, min(count, sum(size > 0 for size in own))) for own in of_each]


def local_part(spec: MethodSpec, layout: Layout) -> Fragment:
    """Returns the part of the model that the server's own machine has: all of it without shards on other machines."""
    if not spec.server.hosts:
        return _joined(layout.fragments(1))
    return _joined(divided(spec, layout)[0][: spec.server.server_shards])


def exchanged(spec: MethodSpec, layout: Layout) -> tuple[Fragment, ...]:
    """Returns the parts of the model that a worker exchanges with the server's own machine, in turn."""
    return (local_part(spec, layout),) if spec.server.hosts else layout.fragments(spec.fragments)


def host_parts(spec: MethodSpec, layout: Layout) -> tuple[Fragment, ...]:
    """Returns the part of the model that each host of a shard has, in the order of the hosts."""
    return divided(spec, layout)[0][spec.server.server_shards :] if spec.server.hosts else ()


def _joined(neighbours: Sequence[Fragment]) -> Fragment:
    first, last = neighbours[0], neighbours[-1]
    return Fragment(slice(first.tensors.start, last.tensors.stop), slice(first.elements.start, last.elements.stop))
