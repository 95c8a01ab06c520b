"""Tests that attributes which compiled modules declare as C doubles are always floats.

In a compiled module, an int becomes a float, and any other value raises a TypeError.
"""

from __future__ import annotations

from policies import load_ledger, scraped_load
from policies.endpoint_load import EndpointLoad
from policies.load_ledger import LoadReservation
from policies.routing_types import Request
from tools.compile.declarations import FLOATS


def busy_load() -> tuple[EndpointLoad, LoadReservation]:
    load, now = EndpointLoad(0), 100.0
    request = Request("id", "m", "t", 900, 40)
    reservations = []
    for number in range(30):
        now += 0.05
        reserved = load_ledger.reserve(load, request, 300 * (number % 2), now, number % 3 > 0)
        reservations.append(reserved)
        if number % 3:
            reserved.on_first_token(now + 0.03)
        if number > 9:
            reservations[number - 9].finish(now + 0.04, 40)
        scraped_load.record_scrape(load, 5, 2, 0.4, 90_000, now + 0.045)
    handed = load_ledger.reserve_decode(load, request, 0, now)
    handed.on_kv_arrived(now + 0.1)
    return load, reservations[-1]


def test_what_compiled_engine_models_declare_as_doubles_are_floats() -> None:
    load, reserved = busy_load()
    timeline = load.timeline
    objects = {
        "EngineLoad": load,
        "EngineModel": timeline,
        "QueuedPrompt": reserved,
        "ArrivalAverages": timeline.arrivals,
        "EngineAverages": timeline.averages,
        "SpeedBelief": load.belief,
    }
    for full, names in FLOATS.items():
        one = objects.pop(full.rpartition(".")[2], None)
        if one is not None:
            for name in names or type(one).__slots__:
                assert type(getattr(one, name)) is float, (full, name, getattr(one, name))
    assert not objects
