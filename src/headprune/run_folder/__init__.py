"""The files of a run: lock, settings, journal and list of exports, written by one process, read without a lock."""

from headprune.run_folder.folder import RunFolder, held_lock
from headprune.run_folder.recovery import RecoveryFolder
from headprune.run_folder.run import Run, finished_record, read_run, write_card

__all__ = ["RecoveryFolder", "Run", "RunFolder", "finished_record", "held_lock", "read_run", "write_card"]
