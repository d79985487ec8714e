"""Work that is written into a run folder: experiments, studies, recovery, learned gates, exports."""
