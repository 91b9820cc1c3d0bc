//! Draws the arrivals over time, one panel a layout, all with the same axes.

use std::{fmt::Write as _, time::Duration};

use crate::{
    Row,
    measure::{Plan, Sample},
};

const WIDTH: f64 = 880.0;
const LEFT: f64 = 74.0;
const RIGHT: f64 = 28.0;
/// Above the first panel: the title and the two lines below it.
const HEAD: f64 = 100.0;
/// Above each plot: the panel's title.
const TITLE: f64 = 30.0;
const PLOT: f64 = 160.0;
const GAP: f64 = 26.0;
/// Below the last panel: the numbers on the axis and what they mean.
const FOOT: f64 = 46.0;

const INK: &str = "#1f2328";
const MUTED: &str = "#59636e";
const FAINT: &str = "#d8dee4";
const WINDOW: &str = "#f3f6f9";
const SPIKE: &str = "#cf222e";
const SPREAD: &str = "#0969da";
const EVEN: &str = "#1a7f37";

/// The arrivals of one layout.
#[derive(Debug)]
pub(crate) struct Panel {
    title: String,
    note: String,
    colour: &'static str,
    /// In each tenth of a second since the first failure.
    counts: Vec<usize>,
    peak: usize,
    /// From the first failure to the last.
    failing: Duration,
}

/// The arrivals in 100 ms if all came evenly over the window.
pub(crate) fn even(plan: &Plan) -> f64 {
    let (lo, hi) = plan.window_ms();
    f64::from(plan.jobs) * 100.0 / (hi - lo).max(100) as f64
}

impl Panel {
    pub(crate) fn new(title: String, row: &Row, samples: &[Sample]) -> Self {
        let failed = || samples.iter().map(|sample| sample.failed);
        let (first, last) = (failed().min(), failed().max());
        let mut counts = Vec::new();
        for sample in samples {
            let since = sample.back - first.unwrap_or(sample.failed);
            let bin = (since.as_secs_f64() * 10.0) as usize;
            if bin >= counts.len() {
                counts.resize(bin + 1, 0);
            }
            counts[bin] += 1;
        }
        let correlation = row.correlation.map_or("undefined".to_owned(), |c| format!("{c:.2}"));
        Self {
            title: capitalised(&title),
            note: format!(
                "correlation of wanted and real delay {correlation} · p99 {} late",
                seconds(row.late_p99_ms)
            ),
            colour: if row.layout == "lanes" { SPREAD } else { SPIKE },
            counts,
            peak: row.peak_100ms,
            failing: first.zip(last).map_or(Duration::ZERO, |(first, last)| last - first),
        }
    }
}

/// The axes that all panels share.
#[derive(Clone, Copy, Debug)]
struct Axes {
    /// In tenths of a second.
    tenths: usize,
    most: f64,
    step: f64,
}

impl Axes {
    fn of(plan: &Plan, panels: &[Panel]) -> Self {
        let last = panels.iter().map(|panel| panel.counts.len()).max().unwrap_or(0);
        let level = (plan.level.as_secs_f64() * 10.0).ceil();
        let most = panels.iter().map(|panel| panel.peak).max().unwrap_or(0).max(1) as f64;
        Self {
            tenths: last.max((level * 1.1) as usize),
            most: most * 1.2,
            step: round_step(most / 4.0),
        }
    }

    fn x(&self, tenths: f64) -> f64 {
        LEFT + tenths / self.tenths as f64 * (WIDTH - LEFT - RIGHT)
    }

    /// Above the lower edge of a plot.
    fn height(&self, count: f64) -> f64 {
        count / self.most * PLOT
    }
}

/// The picture as SVG, on a white ground of its own: it is read in light and in dark pages.
pub(crate) fn draw(plan: &Plan, panels: &[Panel]) -> String {
    let axes = Axes::of(plan, panels);
    let height = HEAD + panels.len() as f64 * (TITLE + PLOT + GAP) - GAP + FOOT;
    let (lo, hi) = plan.window_ms();
    let (lo, hi) = (seconds(lo as f64), seconds(hi as f64));
    let jobs = grouped(plan.jobs.into());
    let heading = format!("{jobs} jobs fail at once. When do they come back?");
    let line = format!(
        "Each is to come back after a random delay between {lo} and {hi} (shaded). Bars: arrivals in each 100 ms."
    );
    let failing = panels.iter().map(|panel| panel.failing).max().unwrap_or_default();
    let beyond = format!(
        "They fail within {}, so the last arrivals may lie that far beyond the shade.",
        seconds((failing.as_secs_f64() * 10.0).ceil() * 100.0)
    );
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" \
         height=\"{height}\" role=\"img\" font-family=\"-apple-system, 'Segoe UI', 'Noto Sans', \
         Helvetica, Arial, 'DejaVu Sans', sans-serif\">\n<title>{heading}</title>\n"
    );
    svg += &format!("<desc>{}</desc>\n", description(panels));
    svg += &format!(
        "<rect x=\"0.5\" y=\"0.5\" width=\"{}\" height=\"{}\" rx=\"8\" fill=\"#ffffff\" \
         stroke=\"{FAINT}\"/>\n",
        WIDTH - 1.0,
        height - 1.0
    );
    text(&mut svg, (28.0, 40.0), ("start", 20, 600), INK, &heading);
    text(&mut svg, (28.0, 64.0), ("start", 13, 400), MUTED, &line);
    text(&mut svg, (28.0, 82.0), ("start", 13, 400), MUTED, &beyond);
    for (index, panel) in panels.iter().enumerate() {
        let bottom = HEAD + index as f64 * (TITLE + PLOT + GAP) + TITLE + PLOT;
        plot(&mut svg, plan, &axes, panel, bottom);
    }
    let bottom = height - FOOT;
    seconds_axis(&mut svg, &axes, bottom);
    svg += "</svg>\n";
    svg
}

fn plot(svg: &mut String, plan: &Plan, axes: &Axes, panel: &Panel, bottom: f64) {
    let top = bottom - PLOT;
    let (lo, hi) = plan.window_ms();
    let (lo, hi) = (axes.x(lo as f64 / 100.0), axes.x(hi as f64 / 100.0));
    text(svg, (LEFT, top - 11.0), ("start", 14, 600), INK, &panel.title);
    text(svg, (WIDTH - RIGHT, top - 11.0), ("end", 12, 400), MUTED, &panel.note);
    let _ = writeln!(
        svg,
        "<rect x=\"{lo:.1}\" y=\"{top}\" width=\"{:.1}\" height=\"{PLOT}\" fill=\"{WINDOW}\"/>",
        hi - lo
    );
    let mut tick = 0.0;
    while tick <= axes.most {
        let y = bottom - axes.height(tick);
        rule(svg, (LEFT, y), (WIDTH - RIGHT, y), FAINT);
        text(svg, (LEFT - 8.0, y + 4.0), ("end", 11, 400), MUTED, &grouped(tick as usize));
        tick += axes.step;
    }
    let middle = top + PLOT / 2.0;
    let _ = writeln!(
        svg,
        "<text x=\"24\" y=\"{middle}\" transform=\"rotate(-90 24 {middle})\" text-anchor=\"middle\" \
         font-size=\"11\" fill=\"{MUTED}\">jobs per 100 ms</text>"
    );

    let wide = axes.x(1.0) - axes.x(0.0);
    let mut bars = String::new();
    for (bin, &count) in panel.counts.iter().enumerate().filter(|(_, count)| **count > 0) {
        let high = axes.height(count as f64).max(1.0);
        // A path: one element instead of a hundred.
        let _ = write!(
            bars,
            "M{:.1} {:.1}h{:.1}v{high:.1}h-{:.1}z",
            axes.x(bin as f64) + 0.5,
            bottom - high,
            wide - 1.0,
            wide - 1.0
        );
    }
    let _ = writeln!(svg, "<path fill=\"{}\" d=\"{bars}\"/>", panel.colour);

    let even = even(plan);
    let y = bottom - axes.height(even);
    let _ = writeln!(
        svg,
        "<path d=\"M{lo:.1} {y:.1}H{hi:.1}\" stroke=\"{EVEN}\" stroke-width=\"1.5\" \
         stroke-dasharray=\"5 3\"/>"
    );
    let label = format!("perfectly even: {even:.0}");
    text(svg, (lo - 6.0, y - 4.0), ("end", 12, 400), EVEN, &label);
    peak_label(svg, axes, panel, bottom);
}

/// Above the highest bar.
fn peak_label(svg: &mut String, axes: &Axes, panel: &Panel, bottom: f64) {
    let Some(highest) = panel.counts.iter().copied().max() else { return };
    let bin = panel.counts.iter().position(|&count| count == highest).unwrap_or(0) as f64;
    let label = format!("peak: {} in any 100 ms (sliding)", grouped(panel.peak));
    // Not over the edges of the plot.
    let x = axes.x(bin + 0.5).clamp(LEFT + 130.0, WIDTH - RIGHT - 130.0);
    let y = (bottom - axes.height(highest as f64) - 8.0).max(bottom - PLOT + 14.0);
    text(svg, (x, y), ("middle", 13, 600), panel.colour, &label);
}

fn seconds_axis(svg: &mut String, axes: &Axes, bottom: f64) {
    let step = round_step(axes.tenths as f64 / 12.0).max(1.0);
    let mut tenths = 0.0;
    while tenths <= axes.tenths as f64 {
        let x = axes.x(tenths);
        rule(svg, (x, bottom), (x, bottom + 4.0), MUTED);
        let label = format!("{}", tenths / 10.0);
        text(svg, (x, bottom + 17.0), ("middle", 11, 400), MUTED, &label);
        tenths += step;
    }
    let middle = (LEFT + WIDTH - RIGHT) / 2.0;
    let what = "seconds since the first failure";
    text(svg, (middle, bottom + 35.0), ("middle", 12, 400), MUTED, what);
}

fn text(
    svg: &mut String,
    (x, y): (f64, f64),
    (anchor, size, weight): (&str, u32, u32),
    colour: &str,
    words: &str,
) {
    let _ = writeln!(
        svg,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" font-size=\"{size}\" \
         font-weight=\"{weight}\" fill=\"{colour}\">{words}</text>"
    );
}

fn rule(svg: &mut String, (x1, y1): (f64, f64), (x2, y2): (f64, f64), colour: &str) {
    let _ = writeln!(
        svg,
        "<path d=\"M{x1:.1} {y1:.1}L{x2:.1} {y2:.1}\" stroke=\"{colour}\" stroke-width=\"1\"/>"
    );
}

/// For those who cannot see it.
fn description(panels: &[Panel]) -> String {
    let said = panels.iter().map(|panel| {
        format!(
            "{}: at most {} jobs in any 100 ms, {}.",
            panel.title,
            grouped(panel.peak),
            panel.note
        )
    });
    said.collect::<Vec<_>>().join(" ")
}

/// 1, 2 or 5 times a power of ten, at least as large.
fn round_step(least: f64) -> f64 {
    let power = 10f64.powf(least.max(1.0).log10().floor());
    [1.0, 2.0, 5.0, 10.0].map(|step| step * power).into_iter().find(|&s| s >= least).unwrap_or(1.0)
}

fn seconds(ms: f64) -> String {
    if ms < 1000.0 {
        format!("{ms:.0} ms")
    } else if ms % 1000.0 == 0.0 {
        format!("{} s", ms / 1000.0)
    } else {
        format!("{:.1} s", ms / 1000.0)
    }
}

/// `12,345`.
fn grouped(number: usize) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

fn capitalised(words: &str) -> String {
    let mut letters = words.chars();
    letters.next().map_or(String::new(), |first| first.to_uppercase().chain(letters).collect())
}
