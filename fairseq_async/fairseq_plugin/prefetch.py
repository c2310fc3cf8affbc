"""fairseq's threads that prepare batches, at the end of the process."""

import queue
import threading
import time

from fairseq.data.iterators import BackgroundConsumer

_SECONDS = 10.0  # for a batch that is being prepared


def end_prefetching() -> None:
    """Ends the threads that fairseq leaves to prepare batches that nobody will ask for.

    When Python ends, a thread that waits for it inside torch is unwound through C++, which aborts the process: a run
    that is complete would seem to have failed. A worker that needs neither validate nor save ends right after its last
    step, often while its next batch is prepared.
    """
    deadline = time.monotonic() + _SECONDS
    consumers = [thread for thread in threading.enumerate() if isinstance(thread, BackgroundConsumer)]
    for consumer in consumers:
        consumer._max_len = 0  # it ends after the next batch
    for consumer in consumers:
        while consumer.is_alive() and time.monotonic() < deadline:
            try:
                consumer._queue.get(timeout=0.05)  # it may be waiting for room
            except queue.Empty:
                pass
