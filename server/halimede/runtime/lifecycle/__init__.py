"""Life cycle of all models: performs what `core.repository` decides.

`models` is the interface; `record` has what is known of each model. `reading` looks at the repository, `loading` loads
one model and swaps it in, `building` makes its versions, `ensembles` has ensembles follow the models of their steps,
`closing` drains and frees what was replaced or unloaded, and `left_behind` ends the wait for work that hangs.

One lock per model name serialises its loads and unloads; different models do not wait for one another but for a free
load slot. State changes on the event loop only.
"""

from halimede.runtime.lifecycle.models import ModelLifecycle
from halimede.runtime.lifecycle.record import Serving

__all__ = ["ModelLifecycle", "Serving"]
