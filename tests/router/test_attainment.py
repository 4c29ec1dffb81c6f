from router.attainment import Attainment, Missed, Target


def note(attainment: Attainment, slo_class: str, target: Target, *, kept: int, missed: int) -> None:
    for outcome in (True,) * kept + (False,) * missed:
        attainment.note(slo_class, target, kept=outcome)


def test_the_class_that_misses_most_counts_each_target_by_itself():
    attainment = Attainment()
    note(attainment, "chat", Target.TTFT, kept=6, missed=2)
    note(attainment, "batch", Target.TTFT, kept=20, missed=0)
    note(attainment, "batch", Target.TBT, kept=9, missed=1)
    assert attainment.missed(0.0) == Missed(ttft=0.25, tbt=0.1)


def test_a_few_requests_say_nothing():
    attainment = Attainment()
    note(attainment, "chat", Target.TTFT, kept=0, missed=4)
    assert attainment.missed(0.0) == Missed()


def test_what_was_long_ago_is_forgotten():
    attainment = Attainment(memory_s=60.0)
    note(attainment, "chat", Target.TTFT, kept=0, missed=10)
    assert attainment.missed(0.0).ttft == 1.0
    attainment.missed(60.0)
    note(attainment, "chat", Target.TTFT, kept=10, missed=0)
    assert 0.2 < attainment.missed(61.0).ttft < 0.3
    attainment.missed(600.0)
    assert attainment.missed(601.0) == Missed()
