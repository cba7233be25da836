"""What the compiler makes of the kernel that merges across devices: above all, the order of its memory accesses."""

from pathlib import Path

import pytest

from tests.compiled import reports_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, dict]:
    """The reports of compile_merging.py, by generation."""
    script = Path(__file__).with_name("compile_merging.py")
    return reports_of(script, tmp_path_factory.mktemp("cache"), key="generation")


def test_nothing_spills(reports):
    for name, report in reports.items():
        resources = report["resources"]
        assert not resources["spills"] and not resources["scratch"], (name, resources)
        # so that all workgroups of a launch are on the device at a time, whatever else runs there
        assert resources["registers"] <= 64, (name, resources)


def test_partials_travel_in_wide_stores(reports):
    for name, report in reports.items():
        assert report["wide"] >= 2, (name, report["wide"])


def test_a_flag_is_raised_when_all_waves_have_stored_their_partials(reports):
    for name, report in reports.items():
        order = report["order"]
        releases = [place for place, kind in enumerate(order) if kind == "release"]
        assert releases, name
        for place in releases:
            stores = [before for before in range(place) if order[before] == "store"]
            between = order[max(stores, default=-1) + 1 : place]
            assert "barrier" in between, (name, between)
            if name.startswith("gfx"):
                barrier = between.index("barrier")
                assert "wait" in between[:barrier], (name, between)
                # not only begun by the release: it is over before the flag is raised
                behind = between[barrier + 1 :]
                assert ("write back", "wait") in zip(behind, behind[1:], strict=False), (name, between)


def test_partials_are_read_after_a_flag_was_acquired_by_all_waves(reports):
    for name, report in reports.items():
        order = report["order"]
        acquires = [place for place, kind in enumerate(order) if kind == "acquire"]
        assert acquires and "clock" in order, (name, order)
        assert "barrier" in order[acquires[0] :], (name, order)
        if name.startswith("sm_"):
            assert "load" in order, (name, order)
