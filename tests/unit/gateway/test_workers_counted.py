"""Several workers' metrics: no sum falls when one is gone, is silent, or ends what it has."""

from __future__ import annotations

from typing import cast

from gateway.meters import Merge
from gateway.workers.counted import Counted
from gateway.workers.process import Answer, Worker

PAGE = (
    '# TYPE served counter\nserved_total {0}.0\n# TYPE lag histogram\nlag_bucket{{le="+Inf"}} {0}.0\nlag_count {0}.0\n'
)
OPEN = "# TYPE open gauge\nopen {0}.0\n"


class Stub:
    """A worker that has counted so much, or does not answer."""

    def __init__(self, count: int) -> None:
        self.count: int | None = count

    async def ask(self, method: str, path: str, timeout_s: float) -> Answer:
        assert (method, path) == ("GET", "/metrics")
        if self.count is None:
            raise TimeoutError
        return Answer(200, {}, (PAGE + OPEN).format(self.count).encode())


async def test_the_supervisors_process_counts_like_those_of_its_workers() -> None:
    serving = [cast("Worker", Stub(5)), cast("Worker", Stub(7))]
    page = await Counted(lambda: serving, list, {}).page("# TYPE open gauge\nopen 2.0\n# TYPE mine gauge\nmine 1.0\n")
    assert "open 14.0\n" in page
    assert "mine 1.0\n" in page


async def test_what_was_counted_by_who_is_silent_ending_or_gone_still_counts() -> None:
    serving, ending = [Stub(5), Stub(7)], [Stub(0)][:0]
    counted = Counted(
        lambda: cast("list[Worker]", list(serving)), lambda: cast("list[Worker]", list(ending)), {"open": Merge.SUM}
    )

    async def says(count: int, now_open: int) -> None:
        page = await counted.page()
        assert f"served_total {count}.0\n" in page
        assert f"lag_count {count}.0\n" in page
        assert f"open {now_open}.0\n" in page

    await says(12, 12)
    serving[1].count = None
    await says(12, 5)
    serving[1].count = 8
    await says(13, 13)
    ending.append(serving.pop())
    serving.append(Stub(1))
    ending[0].count = 9
    await says(15, 6)
    ending.clear()
    await says(15, 6)
    serving[0].count = 6
    del serving[1]
    await says(16, 6)
    await says(16, 6)
