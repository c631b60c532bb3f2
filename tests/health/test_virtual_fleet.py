"""The failover benchmark's virtual fleet: a bad network kills none, and real deaths are still seen."""

from __future__ import annotations

from bench.failing.virtual import VirtualFleet, Weather, measure_virtual


def test_loss_jitter_and_mass_silence_kill_none() -> None:
    figures = measure_virtual(nodes=32, hours=0.1)
    assert figures["virtual_false_deaths"] == 0
    assert figures["virtual_incidents"] >= 1


def test_node_that_was_unlucky_before_a_mass_silence_is_not_called_dead_at_its_beginning() -> None:
    # With these seeds a node had missed several signs by mere loss when all fell silent.
    for seed in (0, 4):
        fleet = VirtualFleet(256, seed=seed)
        fleet.pass_time(40)
        fleet.weather = Weather(0.0, 0.03)
        fleet.pass_time(15, silent=lambda _: True)
        fleet.pass_time(20)
        assert (fleet.verdicts["lost"], fleet.incidents) == (0, 1)


def test_one_node_that_falls_silent_is_seen_in_good_and_bad_weather() -> None:
    for weather, limit in ((Weather(0.0, 0.1), 4.25), (Weather(), 7.0)):
        fleet = VirtualFleet(32, weather=weather)
        fleet.pass_time(120)
        fleet.pass_time(limit, silent=lambda number: number == 3)
        assert fleet.verdicts["lost"] == 1
        assert fleet.incidents == 0


def test_network_beyond_all_bounds_is_called_dead() -> None:
    fleet = VirtualFleet(2, weather=Weather(loss_ratio=0.97))
    fleet.pass_time(300)
    assert fleet.verdicts["lost"] > 0
