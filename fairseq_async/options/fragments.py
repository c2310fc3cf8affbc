"""The options with which local SGD exchanges a model in fragments, and a check of the options that exclude them."""

from pydantic import Field

from fairseq_async.errors import option
from fairseq_async.options.base import Options


class FragmentOptions(Options):
    """The options of fragments: the model has P, each of which is sent every H local steps and taken back τ steps
    later; see :mod:`fairseq_async.algorithms.fragments`."""

    fragments: int = Field(
        1,
        ge=1,
        description="fragments P of the model, which are exchanged in turn, one every H/P local steps",
    )
    fragment_delay: int = Field(
        0,
        ge=0,
        description="local steps τ taken while a fragment is exchanged, before what comes back is taken",
    )

    @property
    def in_fragments(self) -> bool:
        """Whether the worker exchanges fragments, or takes the answer some steps after the update was sent."""
        return self.fragments > 1 or self.fragment_delay > 0

    def check_fragments(self, local_steps: int, others: dict[str, tuple[bool, str]]) -> None:
        """Checks that the options go with fragments, if these are used.

        Args:
            local_steps: H.
            others: by the name of an option: whether it is used, and why it does not go with fragments.

        Raises:
            ValueError: the options do not go together.
        """
        if not self.in_fragments:
            return
        fragments, delay = option("fragments"), option("fragment_delay")
        if local_steps % self.fragments:
            raise ValueError(
                f"{option('local_steps')} is {local_steps}: with {fragments} {self.fragments} give a multiple of it"
            )
        turn = local_steps // self.fragments
        if self.fragment_delay > turn:
            raise ValueError(
                f"{delay} is {self.fragment_delay}: the next fragment goes after {turn} local steps; "
                f"give at most {turn}"
            )
        for name, (used, why) in others.items():
            if used:
                raise ValueError(f"{option(name)} does not go with {fragments if self.fragments > 1 else delay}: {why}")
