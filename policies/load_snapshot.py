"""Records the load of an endpoint at one moment, so that a past decision can be explained."""

from __future__ import annotations

from policies.endpoint_load import EndpointLoad


class LoadSnapshot:
    """The values of an endpoint's load at the time of a pick.

    It keeps no object per number, because every request with the policy `priced` takes three
    snapshots, and the gateway keeps them for the newest 512 requests.

    The learned speed, the requests in flight and the log of changes are not recorded.
    """

    __slots__ = ("_age_groups", "_prefill_s", "_ratios", "_values")

    def __init__(self, load: EndpointLoad) -> None:
        values = EndpointLoad.__new__(EndpointLoad)
        values.copy_engine_values(load)
        values.copy_values(load)
        timeline = load.timeline
        answers = timeline.answers
        self._values = values
        # The groups of running answers are replaced at each change, never changed in place.
        self._age_groups, self._ratios = answers.age_groups, answers.ratios
        self._prefill_s = timeline.prefill_s

    def restore(self, live: EndpointLoad) -> EndpointLoad:
        """Return the load as it was, with the learned speed that `live` has now.

        live  the present load of the same endpoint
        """
        load = EndpointLoad(live.slot, live.belief)
        load.copy_engine_values(self._values)
        load.copy_values(self._values)
        load.lockstep_ranks = tuple(
            [load if rank is live else rank for rank in load.lockstep_ranks]
        )
        load.timeline.prefill_s = self._prefill_s
        load.timeline.answers.restore(load, self._age_groups, self._ratios)
        return load
