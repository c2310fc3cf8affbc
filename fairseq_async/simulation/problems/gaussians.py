"""A toy problem: to tell from which of several mixtures of Gaussians a point was drawn."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fairseq_async.errors import ConfigurationError


class Gaussians:
    """Classification of points by a network with one hidden layer. Training takes seconds on a CPU.

    Each class is a mixture of ``components`` Gaussians with random means, so the classes overlap and surround each
    other. Liu et al. 2024 (arXiv 2401.09135) try out delayed Nesterov on this kind of task.

    Args:
        dimensions: number of dimensions of a point.
        noise: standard deviation of each Gaussian; that of the means is 1.

    Raises:
        ConfigurationError: a size is not a whole number of at least 1.
    """

    def __init__(
        self,
        seed: int,
        device: torch.device,
        samples: int = 8192,
        classes: int = 8,
        components: int = 4,
        dimensions: int = 16,
        noise: float = 0.7,
        hidden: int = 64,
    ) -> None:
        _check_sizes(samples=samples, classes=classes, components=components, dimensions=dimensions, hidden=hidden)
        generator = torch.Generator().manual_seed(seed)
        self.samples = samples
        means = torch.randn(classes * components, dimensions, generator=generator)
        drawn = torch.randint(classes * components, (samples + samples // 4,), generator=generator)
        points = means[drawn] + noise * torch.randn(len(drawn), dimensions, generator=generator)
        self.points, self.labels = points.to(device), (drawn % classes).to(device)
        self.model = nn.Sequential(nn.Linear(dimensions, hidden), nn.Tanh(), nn.Linear(hidden, classes)).to(device)

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Returns points and labels."""
        chosen = torch.tensor(indices, device=self.points.device)
        return self.points[chosen], self.labels[chosen]

    def loss(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, float]:
        """Returns the mean cross entropy, and the number of points."""
        points, labels = batch
        return self._cross_entropy(points, labels), float(len(labels))

    @torch.no_grad()
    def evaluate(self) -> float:
        """Returns the mean cross entropy on a fifth of all points, which are not trained on."""
        return float(self._cross_entropy(self.points[self.samples :], self.labels[self.samples :]))

    def _cross_entropy(self, points: Tensor, labels: Tensor) -> Tensor:
        outputs = self.model(points.to(next(self.model.parameters())))
        return cross_entropy(outputs.float(), labels)


def _check_sizes(**sizes: object) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ConfigurationError(
                f'"problem" (gaussians): "{name}" must be a whole number of at least 1 (it is {size!r})'
            )
