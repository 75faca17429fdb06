"""Draw a run, finished or not, as one HTML file that stands alone.

    python experiments/report.py runs/speed_rloo [--out=report.html]        (default: report.html in the run's folder)
"""

from absl import app, flags

_OUT = flags.DEFINE_string("out", None, "The HTML file; default: report.html in the workdir.")


def main(argv):
    from rl_speed.config import command

    if len(argv) != 2:
        command.fail("usage: python experiments/report.py WORKDIR [--out=FILE]")
    from rl_speed.studies.inspection import write_report

    try:
        path = write_report(argv[1], _OUT.value)
    except ValueError as error:
        command.fail(str(error))
    except OSError as error:
        command.fail(f"{error}; --out=FILE writes the report elsewhere")
    print(f"report: {path} ({path.stat().st_size / 1e6:.2f} MB)")


if __name__ == "__main__":
    app.run(main)
