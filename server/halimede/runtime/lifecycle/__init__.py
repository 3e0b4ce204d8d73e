"""Life cycle of all models: performs what `core.repository` decides.

`models` is the interface; `record` keeps the state of each model. `reading` reads the repository, `loading` loads one
model and swaps it in, `building` makes its versions, `ensembles` updates ensembles when the models of their steps
change, `closing` drains and frees replaced and unloaded versions, and `left_behind` ends the wait for work that hangs.

One lock per model name serialises its loads and unloads. Different models only share the load slots. State changes on
the event loop only.
"""

from halimede.runtime.lifecycle.models import CLOSE_TIMEOUT_SECS, ModelLifecycle
from halimede.runtime.lifecycle.record import Serving

__all__ = ["CLOSE_TIMEOUT_SECS", "ModelLifecycle", "Serving"]
