"""Small messages of queues between processes, without the queue's thread."""

from __future__ import annotations

import multiprocessing
import multiprocessing.queues
import queue
import select
import threading
import time
from typing import Any

import torch
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from torch.utils.data._utils.direct_queue import DirectQueue

SMALL: Any = (1, [2, 3])
LARGE: Any = (4, b"x" * 100_000)


def feeders() -> int:
    return sum(thread.name == "QueueFeederThread" for thread in threading.enumerate())


class Slow:
    """A message that does not fit into the pipe at once and takes long to pickle in the queue's thread."""

    def __init__(self, number: int, _: bytes = b"") -> None:
        self.number = number

    def __reduce__(self) -> Any:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.3)
        return Slow, (self.number, b"x" * 5000)


class DirectQueueTest(TestCase):
    def setUp(self) -> None:
        self.queue = multiprocessing.get_context("fork").Queue()
        self.addCleanup(self.queue.join_thread)
        self.addCleanup(self.queue.close)
        self.feeders = feeders()

    def _take(self, count: int) -> list[Any]:
        return [self.queue.get(timeout=30) for _ in range(count)]

    def test_small_messages_need_no_thread(self) -> None:
        direct = DirectQueue(self.queue)
        for number in range(10):
            direct.put(number)
        self.assertEqual(feeders(), self.feeders)
        self.assertEqual(direct.qsize(), 10)
        self.assertEqual(self._take(10), list(range(10)))
        self.assertEqual(direct.qsize(), 0)

    def test_order_is_kept_behind_a_large_message(self) -> None:
        direct = DirectQueue(self.queue)
        sent = [0, LARGE, *range(200), LARGE, None]
        for item in sent:
            direct.put(item)
        self.assertEqual(self._take(len(sent)), sent)

    def test_order_is_kept_behind_what_the_thread_is_still_at(self) -> None:
        """It is out of the queue's buffer by then, and the pipe is free."""
        direct = DirectQueue(self.queue)
        sent = [Slow(0), SMALL, Slow(1), SMALL]
        for item in sent:
            direct.put(item)
            # Long enough for the thread to have begun, and not to be done.
            time.sleep(0.1)
        self.assertEqual([type(item) for item in self._take(4)], [Slow, tuple, Slow, tuple])

    def test_thread_that_is_done_is_not_used_again(self) -> None:
        direct = DirectQueue(self.queue)
        direct.put(LARGE)
        self.assertEqual(self._take(1), [LARGE])
        deadline = time.monotonic() + 30
        while not direct.put_at_once(SMALL):
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.001)
        self.assertEqual(self._take(1), [SMALL])

    def test_full_pipe_is_not_waited_for(self) -> None:
        direct = DirectQueue(self.queue)
        message = b"x" * 3000
        for _ in range(100):
            direct.put(message)
        self.assertFalse(direct.put_at_once(message))
        self.assertEqual(self._take(100), [message] * 100)

    def test_another_process_that_writes_is_not_waited_for(self) -> None:
        direct = DirectQueue(self.queue)
        with self.queue._wlock:
            self.assertFalse(direct.put_at_once(SMALL))
        self.assertEqual(self.queue.qsize(), 0)
        self.assertTrue(direct.put_at_once(SMALL))
        self.assertEqual(self._take(1), [SMALL])

    def test_longest_message(self) -> None:
        """The length of a message goes into the same piece."""
        direct = DirectQueue(self.queue)
        size = select.PIPE_BUF - 4
        overhead = len(multiprocessing.reduction.ForkingPickler.dumps(b"x" * 3000)) - 3000
        self.assertTrue(direct.put_at_once(b"x" * (size - overhead)))
        self.assertFalse(direct.put_at_once(b"x" * (size - overhead + 1)))
        self.assertEqual(len(self._take(1)[0]), size - overhead)

    def test_what_cannot_be_pickled_is_for_the_thread_to_report(self) -> None:
        direct = DirectQueue(self.queue)
        self.assertFalse(direct.put_at_once(threading.Lock()))
        self.assertEqual(self.queue.qsize(), 0)

    def test_get(self) -> None:
        direct = DirectQueue(self.queue)
        with self.assertRaises(queue.Empty):
            direct.get(timeout=0.01)
        with self.queue._rlock, self.assertRaises(queue.Empty):
            direct.get(timeout=0.01)
        for item in (SMALL, LARGE):
            direct.put(item)
        self.assertEqual([direct.get(timeout=30) for _ in range(2)], [SMALL, LARGE])
        self.assertEqual(direct.qsize(), 0)

    def test_closed(self) -> None:
        direct = DirectQueue(self.queue)
        direct.close()
        for use in (lambda: direct.put(SMALL), lambda: direct.get(timeout=1)):
            with self.assertRaisesRegex(ValueError, "closed"):
                use()

    def test_queues_of_other_classes_are_used_as_they_are(self) -> None:
        class Other(multiprocessing.queues.Queue):  # type: ignore[type-arg]
            pass

        other = Other(ctx=multiprocessing.get_context("fork"))
        for usual in (queue.Queue(), other):
            direct = DirectQueue(usual)
            self.assertFalse(direct.put_at_once(SMALL))
            direct.put(SMALL)
            self.assertEqual(direct.get(timeout=30), SMALL)
        other.close()
        other.join_thread()


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3,), float(index))


class SlowStream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        info: Any = torch.utils.data.get_worker_info()
        return map(Slow, range(info.id, 10, info.num_workers))


class SlowNumbers(Numbers):
    def __getitem__(self, index: int) -> Any:
        return Slow(index)


class LoaderTest(TestCase):
    def test_last_batch_arrives_before_the_end_of_its_worker(self) -> None:
        loader: Any = DataLoader(
            SlowStream(), batch_size=2, num_workers=2, pin_memory=True, collate_fn=list
        )
        found = sorted(sample.number for batch in loader for sample in batch)
        self.assertEqual(found, list(range(10)))

    def test_no_batch_of_an_epoch_that_was_left_arrives_in_the_next(self) -> None:
        epochs = iter([range(0, 8), range(10, 18)])

        class EpochSampler(Sampler[int]):
            def __iter__(self) -> Any:
                return iter(next(epochs))

        loader: Any = DataLoader(
            SlowNumbers(),
            sampler=EpochSampler(),
            batch_size=2,
            num_workers=2,
            pin_memory=True,
            persistent_workers=True,
            collate_fn=list,
        )
        self.assertEqual([sample.number for sample in next(iter(loader))], [0, 1])
        found = [sample.number for batch in loader for sample in batch]
        self.assertEqual(found, list(range(10, 18)))

    def test_no_thread_writes_indices(self) -> None:
        before = feeders()
        loader = DataLoader(
            Numbers(), batch_size=4, num_workers=2, pin_memory=True, persistent_workers=True
        )
        for _ in range(2):
            found = torch.cat(list(loader))[:, 0].tolist()
            self.assertEqual(found, [float(number) for number in range(64)])
            self.assertEqual(feeders(), before)

    def test_batches_whose_indices_do_not_fit(self) -> None:
        class Many(Numbers):
            def __len__(self) -> int:
                return 6000

        sampler = [list(range(3000)), list(range(3000, 3004)), list(range(3004, 6000)), [5999], [0]]
        loader: Any = DataLoader(Many(), batch_sampler=sampler, num_workers=1, pin_memory=True)
        found = [batch[:, 0].tolist() for batch in loader]
        self.assertEqual(found, [[float(number) for number in batch] for batch in sampler])


if __name__ == "__main__":
    run_tests()
