"""Program that encloses itself as a reward's worker does, and prints which measures hold here, as JSON."""

import json
from dataclasses import asdict

from relaxd.sandbox.enclosure import Plan, enclose

if __name__ == "__main__":
    print(json.dumps([asdict(one) for one in enclose(Plan())]))
