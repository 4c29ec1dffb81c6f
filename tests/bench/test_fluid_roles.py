import json

import pytest

from baton.ids import Role
from bench.fluid_roles import day, main, oscillations
from bench.simulated.cluster import RoleChange


def change(at_s: float, role: Role) -> RoleChange:
    return RoleChange(decided_s=at_s, changed_s=at_s + 1.0, worker="p0", role=role)


def test_a_day_has_conversations_in_the_morning_and_documents_at_noon():
    requests = day(2400.0, seed=0)
    morning = [one for one in requests if 800 <= one.at_s < 1100]
    noon = [one for one in requests if 1200 <= one.at_s < 1600]
    assert sum(one.input_tokens > 4000 for one in morning) < 0.1 * len(morning)
    assert sum(one.input_tokens > 4000 for one in noon) > 0.6 * len(noon)
    assert requests == sorted(requests, key=lambda one: one.at_s)


def test_a_change_that_is_soon_taken_back_is_an_oscillation():
    there, back = Role.PREFILL, Role.DECODE
    changes = [change(0, there), change(100, there), change(150, back), change(900, there)]
    assert oscillations(changes, within_s=120.0) == 1


@pytest.mark.timeout(60)
def test_a_short_day_is_served_with_and_without_the_planner(tmp_path, capsys):
    path = tmp_path / "fluid.json"
    main(["--workers", "3", "--day", "40", "--json", str(path)])
    figures = json.loads(path.read_text())["figures"]
    assert {"attainment_fixed_1p2d", "attainment_fixed_2p1d"} <= figures.keys()
    best = max(value for name, value in figures.items() if name.startswith("attainment_fixed"))
    assert figures["attainment_best_fixed"] == best
    assert 0.0 <= figures["attainment_fluid"] <= 1.0
    assert "then fluid" in capsys.readouterr().out
