"""What the server writes down of a run."""

import torch

from fairseq_async.server.run_files.event_log import checksum


def test_a_checksum_tells_one_bit() -> None:
    vector = torch.ones(5)
    before = checksum(vector)
    vector.view(torch.int32)[3] ^= 1
    assert before == checksum(torch.ones(5)) != checksum(vector) and len(before) == 8
