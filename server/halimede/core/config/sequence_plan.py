"""The plan of a model's sequences, from its configuration.

It is read from the configuration's JSON, as worker processes do, which do not have the classes of configurations.
"""

import json

from halimede.core.config.model_config import ModelConfig
from halimede.core.config.write import to_json
from halimede.core.sequences.plan import SequencePlan, read_plan


def sequence_plan(config: ModelConfig) -> SequencePlan | None:
    """The plan of a complete and checked configuration; None for a model without sequences."""
    return None if config.sequence_batching is None else read_plan(json.loads(to_json(config)))
