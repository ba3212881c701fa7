"""The names of the cases and properties of a loss, and what they are."""

from contrastile.verify.losses import calling, cases, ranks

CASES = {
    **{batch.name: batch.about for batch in cases.BATCHES.values()},
    **cases.OWN,
    **ranks.SHARDS,
}
PROPERTIES = {
    **{each.name: each.about for each in calling.PROPERTIES.values()},
    **{name: about for name, (_, about) in ranks.DISTRIBUTED.items()},
}
