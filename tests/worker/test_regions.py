"""HALoS with real servers: regions whose servers are workers of a global one, all in threads of this process."""

from contextlib import ExitStack
from pathlib import Path

import torch

from fairseq_async.reporting.audit import audit
from tests.helpers.references import HALoS64
from tests.helpers.regions import (
    RegionServer,
    RegionWorker,
    global_server,
    parameter_server,
    region_server,
    region_spec,
    wait_until,
)

RULE = "outer=delayed_nesterov,outer_lr=0.3,outer_momentum=0.5,delay=2"


def test_two_regions_of_two_workers_are_the_papers_algorithm_in_float64(tmp_path: Path) -> None:
    """Messages take no time here: nobody goes on before a merge is done. K = 3, α = 0.25, 18 updates in each region."""
    generator = torch.Generator().manual_seed(3)
    with ExitStack() as stack:
        above = stack.enter_context(global_server(tmp_path / "global"))
        servers = [stack.enter_context(region_server(tmp_path / f"region{r}", workers=2)) for r in (0, 1)]
        workers = []
        for region, server in enumerate(servers):
            spec = region_spec(f"{above.address},region={region},updates=3,{RULE}", workers=2)
            workers.append([RegionWorker(server, worker, spec) for worker in (0, 1)])
        paper = HALoS64(workers[0][0].pull(), 2, (0.8, 0.9, 4), (0.3, 0.5, 2), every=3, alpha=0.25)
        for turn in range(36):
            region, worker = turn % 2, turn // 2 % 2
            delta = torch.randn(5, generator=generator)
            workers[region][worker].push(delta)
            paper.arrive(region, delta)
            if paper.arrived[region] % 3 == 0:
                merges = paper.arrived[region] // 3
                wait_until(lambda r=region, m=merges, n=paper.arrived[region]: _version(servers[r]) == n + m)  # type: ignore[misc]
            found = workers[region][worker].pull()
            assert torch.allclose(found.double(), paper.regions[region].theta, rtol=1e-5, atol=1e-6)
        assert torch.allclose(parameter_server(above).parameters.double(), paper.above.theta, rtol=1e-5, atol=1e-6)
        assert parameter_server(above).version == 12 and not torch.equal(found, workers[0][0].pull())
    assert audit(tmp_path / "global").applied == 12
    assert audit(tmp_path / "region1").applied == 18


def _version(server: RegionServer) -> int:
    return parameter_server(server).version
