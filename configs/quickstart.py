"""A small GPT on real text, on a laptop, in minutes.

python -m attnlab.train --config=configs/quickstart.py
python -m attnlab.train --config=configs/quickstart.py --workdir=runs/mine --config.data.path=FILE.txt
"""

from attnlab.config import default


def get_config():
    return default()
