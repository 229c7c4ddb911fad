"""Every test sees 8 emulated CPU devices."""

import muon_shard

muon_shard.emulate_devices(8)
