"""What tests of several folders share; `run_*` are programs that tests start in processes of their own."""
