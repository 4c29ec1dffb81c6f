from router.admin.stories import clock_shift_s


def test_processes_of_one_host_have_one_clock():
    assert clock_shift_s(10.0, 10.001, 10.002) == 0.0


def test_another_hosts_times_are_moved_to_this_ones_clock():
    assert clock_shift_s(10.0, 500.0, 12.0) == -489.0
