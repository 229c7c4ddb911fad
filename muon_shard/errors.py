"""One shape for every error about leaves: gather all of them, then raise once."""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Offence:
    """Why one leaf cannot be served: `params['wq'] of shape f32[8,8] with spec P(None, 'x'): reason`."""

    path: str
    reason: str
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    spec: object = None

    def __str__(self) -> str:
        of = "" if self.shape is None else f" of shape {self.dtype or ''}[{','.join(map(str, self.shape))}]"
        with_ = "" if self.spec is None else f" with spec {self.spec}"
        return f"* {self.path}{of}{with_}: {self.reason}"


def raise_for_leaves(where: str, problem: str, offences: Sequence[Offence], remedy: str) -> None:
    """Raises one `ValueError` that lists every offending leaf; does nothing when there is none."""
    if not offences:
        return
    noun = "1 leaf" if len(offences) == 1 else f"{len(offences)} leaves"
    raise ValueError("\n".join([f"{where}: {noun} {problem}.", *map(str, offences), remedy]))
