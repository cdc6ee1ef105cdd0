"""Runs the example of Trainer in one of several processes, whole, and again from a checkpoint of its second epoch.

Arguments: the example, a folder, the number of processes, the rank, and a port.
"""

import json
import runpy
import sys
from pathlib import Path

from tests.trainers.run_example import record_ids, set_environment


def main():
    example, folder, num_processes, rank, port = sys.argv[1:]
    set_environment(num_processes, rank, port)
    ids = record_ids()
    made = runpy.run_path(example)
    trainer = made["make_trainer"](folder, save_strategy="steps", save_steps=13)
    trainer.train()
    said = {"reports": made["reports_of"](trainer), "ids": [*ids]}
    ids.clear()
    resumed = made["make_trainer"](folder, save_strategy="no")
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-13")
    said |= {"resumed": made["reports_of"](resumed), "ids_resumed": ids}
    Path(folder, f"{rank}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
