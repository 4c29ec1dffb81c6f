"""Which workers a launcher has, and which come and go when other numbers of them are asked for.

Pure: no processes. The workers of a role are a pool, named `decode-0`, `decode-1` and so on. Of a pool that shrinks those
with the highest names go. A worker counts where it was started, whatever role it has taken since.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from baton.errors import InvalidRequestError
from baton.ids import Role
from baton_cluster.launch.plan import ChildPlan

PlanWorker = Callable[[Role, int, int], ChildPlan]
"""Plans a worker: its role, its place in the pool, and its number among all workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetChange:
    """What follows from other numbers of workers."""

    added: tuple[ChildPlan, ...]
    retired: tuple[str, ...]


class WorkerFleet:
    """The workers of one launcher. Not thread-safe: one owner.

    Args:
        started: Those that are started with the cluster; they have the numbers from 0 on.
        plan: Plans a further one.
        most: So many are allowed at once.
        gpus: Of this machine. Each added worker needs one for itself; 0 where workers need none, or elsewhere.
        others: Whether workers that run elsewhere are joined to these: then any pool here may become empty.
    """

    def __init__(
        self,
        started: Sequence[ChildPlan],
        plan: PlanWorker,
        *,
        most: int,
        gpus: int = 0,
        others: bool = False,
    ) -> None:
        self._plan = plan
        self._most = most
        self._gpus = gpus
        self._others = others
        self._plans = {each.name: each for each in started}
        self._numbers = {each.name: number for number, each in enumerate(started)}
        self._started = len(started)
        self._wanted = dict.fromkeys(Role, 0)
        for each in started:
            self._wanted[Role(each.role)] += 1

    @property
    def plans(self) -> tuple[ChildPlan, ...]:
        """All workers, also those that have been retired and are not gone yet."""
        return tuple(self._plans.values())

    @property
    def pools(self) -> dict[str, int]:
        """How many of each role are wanted."""
        return {role.value: count for role, count in self._wanted.items()}

    def scale(self, pools: Mapping[str, int]) -> FleetChange:
        """Wants other numbers in the pools that are named.

        Raises:
            InvalidRequestError: There is no such pool, or the numbers are impossible; nothing has changed.
        """
        wanted = dict(self._wanted)
        for name, count in pools.items():
            wanted[_role(name)] = _count(name, count)
        self._check(wanted)
        before, after = _names(self._wanted), _names(wanted)
        numbers, added = dict(self._numbers), list[ChildPlan]()
        for name, (role, index) in after.items():
            if name in before:
                continue
            plan = self._plans.get(name)  # one that was retired, and is not gone yet
            if plan is None:
                number = self._free_number(numbers.values(), name)
                numbers[name], plan = number, self._plan(role, index, number)
            added.append(plan)
        self._wanted, self._numbers = wanted, numbers
        self._plans |= {plan.name: plan for plan in added}
        return FleetChange(
            added=tuple(added), retired=tuple(name for name in before if name not in after)
        )

    def gone(self, name: str) -> None:
        """A worker that was retired is gone: another may have what it had of the machine."""
        self._plans.pop(name, None)
        self._numbers.pop(name, None)

    def check_integrity(self) -> None:
        """Raises `AssertionError` if the records contradict each other."""
        assert self._plans.keys() == self._numbers.keys()
        assert _names(self._wanted).keys() <= self._plans.keys(), "a wanted worker has no plan"
        assert len(set(self._numbers.values())) == len(self._numbers), "a number is taken twice"

    def _check(self, wanted: Mapping[Role, int]) -> None:
        total = sum(wanted.values())
        shown = " ".join(f"{role.value}={count}" for role, count in wanted.items() if count)
        if total > self._most and total > sum(self._wanted.values()):
            raise InvalidRequestError(
                f"{shown} are {total} workers: cluster.max_workers is {self._most}"
            )
        for pool, does, roles in _NEEDED:
            had = any(self._wanted[role] for role in roles)
            if had and not self._others and not any(wanted[role] for role in roles):
                raise InvalidRequestError(
                    f"{pool}=0: no worker would be left that {does}; at least one {pool} or hybrid worker stays"
                )

    def _free_number(self, taken: Iterable[int], name: str) -> int:
        numbers = set(taken)
        number = next(each for each in range(len(numbers) + 1) if each not in numbers)
        if self._gpus and number >= max(self._started, self._gpus):
            raise InvalidRequestError(
                f"{name}: the {self._gpus} GPUs of this machine are taken by {len(numbers)} workers, those included that"
                " still finish their requests"
            )
        return number


_NEEDED = (
    ("prefill", "prefills", (Role.PREFILL, Role.HYBRID)),
    ("decode", "decodes", (Role.DECODE, Role.HYBRID)),
)


def _names(counts: Mapping[Role, int]) -> dict[str, tuple[Role, int]]:
    return {
        f"{role.value}-{index}": (role, index)
        for role, count in counts.items()
        for index in range(count)
    }


def _role(name: str) -> Role:
    try:
        return Role(name)
    except ValueError:
        pools = ", ".join(role.value for role in Role)
        raise InvalidRequestError(f"{name}: there is no such pool; the pools are {pools}") from None


def _count(name: str, count: int) -> int:
    if count < 0:
        raise InvalidRequestError(f"{name}={count}: the number of workers must be at least 0")
    return count
