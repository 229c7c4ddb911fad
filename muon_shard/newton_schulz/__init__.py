"""Newton–Schulz orthogonalization: coefficient sets, the forms it can take, and which one a shape gets."""

from muon_shard.newton_schulz.coefficients import COEFFICIENTS as COEFFICIENTS
from muon_shard.newton_schulz.coefficients import coefficients as coefficients
from muon_shard.newton_schulz.orthogonalize import NewtonSchulz as NewtonSchulz
from muon_shard.newton_schulz.orthogonalize import make_orthogonalizer as make_orthogonalizer
from muon_shard.newton_schulz.orthogonalize import narrowed as narrowed
from muon_shard.newton_schulz.orthogonalize import orthogonalize as orthogonalize
from muon_shard.newton_schulz.orthogonalize import why_not_narrowed as why_not_narrowed
