"""Runs where SGLang is. One line of JSON for each case on the command line:

- of the first list, options: what check_options says to them;
- of the second list, [model folder, RolloutConfig, share of a GPU]: mem_fraction_static, or why there is none.
"""

import json
import sys

from relaxd.config import RolloutConfig
from relaxd.rpc.errors import InvalidArgument
from services.rollout.engines.sglang.sglang_options import OptionError, check_options, server_args


def main() -> None:
    for case in json.loads(sys.argv[1]):
        try:
            check_options(case)
            print(json.dumps(""))
        except OptionError as error:
            print(json.dumps(str(error)))
    for folder, rollout, share in json.loads(sys.argv[2]):
        try:
            args = server_args(folder, RolloutConfig(**rollout), colocate=False, share=share)
            print(json.dumps(args.mem_fraction_static))
        except InvalidArgument as error:
            print(json.dumps(str(error)))


if __name__ == "__main__":
    main()
