"""What `helm test` runs, in a pod, as the operator's ServiceAccount: does the operator of this release act?

Arguments: the API server's URL, the folder with its CA and our token, how many seconds to wait, the path of the Lease,
and paths that must be there for us.
"""

import json
import ssl
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

PERIOD_S = 1.0
url, folder, limit_s, lease, *paths = sys.argv[1:]


def get(path: str) -> dict[str, Any]:  # Any: JSON
    token = Path(folder, "token").read_text()
    request = urllib.request.Request(url + path, headers={"Authorization": f"Bearer {token}"})  # noqa: S310 - the chart's
    context = ssl.create_default_context(cafile=f"{folder}/ca.crt") if url.startswith("https:") else None
    try:
        with urllib.request.urlopen(request, timeout=10, context=context) as answer:  # noqa: S310 - the chart's
            value: dict[str, Any] = json.load(answer)
            return value
    except (OSError, ValueError) as error:
        sys.exit(f"GET {path}: {error}")


for each in paths:
    get(each)
    print(f"{each} is there", flush=True)

spec = first = get(lease).get("spec") or {}
give_up_at = time.monotonic() + float(limit_s)
# Without a look at the clock: that of the operator's node may be another one.
while not spec.get("holderIdentity") or spec.get("renewTime") == first.get("renewTime"):
    if time.monotonic() > give_up_at:
        sys.exit(f"No operator renews its Lease {lease}: see the logs of the operator's pods")
    time.sleep(PERIOD_S)
    spec = get(lease).get("spec") or {}
print(f"{spec['holderIdentity']} renews the Lease: it is the active operator")
