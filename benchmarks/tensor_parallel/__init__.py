"""What several GPUs with one model take on paper, and what a load makes of them in the simulator. Nothing is
measured."""
