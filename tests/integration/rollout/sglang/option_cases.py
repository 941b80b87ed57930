"""Runs where SGLang is: what check_options says to each of the options on the command line, one line of JSON each."""

import json
import sys

from services.rollout.engines.sglang.options import OptionError, check_options


def main() -> None:
    for case in json.loads(sys.argv[1]):
        try:
            check_options(case)
            print(json.dumps(""))
        except OptionError as error:
            print(json.dumps(str(error)))


if __name__ == "__main__":
    main()
