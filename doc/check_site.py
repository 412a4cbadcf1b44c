"""Load every page of the built site in a headless browser: at a desk, by night, and on a phone.

    python -m sphinx -W doc doc/_build/html
    python doc/check_site.py doc/_build/html [--browser /usr/bin/chromium] [--pictures FOLDER]

Asserts of each page: it does not scroll sideways, no picture is missing, headings get smaller with
their level, every link to the site itself finds its page and its place, and the console tells of no
error. At a desk no page but those of the API is higher than 12,000 pixels, and no line of code is
cut. In dark colours the pictures are dark, and on every page text stands out from what is behind
it. Needs the package playwright and a Chromium; what is not part of the site is not loaded.
"""

import argparse
import functools
import http.server
import pathlib
import shutil
import sys
import threading
import urllib.parse

VIEWS = {  # width and height in pixels, colours
    "desk": (1280, 900, "light"),
    "dark": (1280, 900, "dark"),
    "phone": (390, 844, "light"),
}
HIGHEST = 12_000  # pixels at a desk
LEAST_CONTRAST = 4.5  # of text and background: level AA of the accessibility guidelines WCAG 2
MEASURE = """least => {
  const size = tag => {
    const found = [...document.querySelectorAll('article ' + tag)]
      .filter(e => e.getClientRects().length);
    return found.map(e => parseFloat(getComputedStyle(e).fontSize));
  };
  const wide = [...document.querySelectorAll('body *')].filter(e =>
    e.getBoundingClientRect().right > innerWidth + 1 && !hidden(e));
  function hidden(e) {  // inside of something that scrolls by itself, or is not shown
    for (let p = e; p && p !== document.body; p = p.parentElement) {
      const style = getComputedStyle(p);
      if (style.position === 'fixed' || style.visibility === 'hidden') return true;
      if (p !== e && style.overflowX !== 'visible') return true;
    }
    return false;
  }
  const seen = e => e.getClientRects().length && getComputedStyle(e).visibility !== 'hidden';
  // numbers of a colour as the browser writes it: rgb(…), rgba(…) and color(srgb …)
  const numbers = text => {
    const found = text.match(/[\\d.]+/g).map(Number);
    const unit = text.startsWith('color') ? 1 : 255;
    return [...found.slice(0, 3).map(v => v / unit), found[3] ?? 1];
  };
  const light = rgb => rgb.slice(0, 3)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = e => {  // the first opaque colour behind
    for (let p = e; p; p = p.parentElement) {
      const colour = numbers(getComputedStyle(p).backgroundColor);
      if (colour[3] > 0.5) return colour;
    }
    return [1, 1, 1];
  };
  const contrast = e => {
    const both = [light(numbers(getComputedStyle(e).color)), light(behind(e))];
    return (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
  };
  const words = e => [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
  const texts = [...document.querySelectorAll('article *')].filter(
    e => seen(e) && words(e) && !e.closest('mjx-container'));
  const bright = i => {  // mean lightness of a picture as it is shown
    const canvas = document.createElement('canvas');
    canvas.width = canvas.height = 32;
    const draw = canvas.getContext('2d');
    draw.filter = getComputedStyle(i).filter;
    draw.fillStyle = `rgb(${behind(i).slice(0, 3).map(v => 255 * v).join()})`;
    draw.fillRect(0, 0, 32, 32);
    draw.drawImage(i, 0, 0, 32, 32);
    const all = draw.getImageData(0, 0, 32, 32).data;
    return all.reduce((sum, v, k) => k % 4 === 3 ? sum : sum + v, 0) / (3 * 1024 * 255);
  };
  return {
    height: document.documentElement.scrollHeight,
    faint: [...new Set(texts.map(e => [contrast(e), e]).filter(([c]) => c < least)
      .map(([c, e]) => `${e.tagName}.${e.className} ${c.toFixed(1)}`))].slice(0, 5),
    bright: [...document.querySelectorAll('article img')].filter(i => seen(i) && i.naturalWidth)
      .map(i => [bright(i), i.src]).filter(([b]) => b > 0.5).map(([, source]) => source),
    overflow: document.documentElement.scrollWidth - innerWidth,
    wide: wide.slice(0, 3).map(e => e.tagName + '.' + e.className),
    cut: [...document.querySelectorAll('article pre')]
      .filter(e => seen(e) && e.scrollWidth > e.clientWidth + 1)
      .map(e => `${e.scrollWidth - e.clientWidth} px of ` + e.innerText.split('\\n')
        .reduce((a, b) => b.length > a.length ? b : a).slice(0, 90)),
    missing: [...document.images].filter(i => !i.complete || !i.naturalWidth).map(i => i.src),
    sizes: ['h1', 'h2', 'h3'].map(size),
    links: [...document.querySelectorAll('a[href]')].map(a => a.href),
    ids: [...document.querySelectorAll('[id]')].map(e => e.id),
  };
}"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files and writes no log."""

    def log_message(self, *args):
        pass


def arguments():
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("site", type=pathlib.Path, help="folder with the built pages")
    parser.add_argument("--browser", default=shutil.which("chromium") or shutil.which("chrome"))
    parser.add_argument("--pictures", type=pathlib.Path, help="folder for a picture of each page")
    return parser.parse_args()


def in_order(sizes):
    """Return whether each level of headings is smaller than the one above it."""
    ends = [(min(s), max(s)) for s in sizes if s]
    return all(above[0] > below[1] for above, below in zip(ends, ends[1:], strict=False))


def look_at(page, address, origin):
    """Return (what was measured, console errors) of one page."""
    errors = []
    on_console = errors.append

    def on_message(message):
        url = message.location.get("url", origin)
        if message.type == "error" and origin in url and not url.endswith("favicon.ico"):
            on_console(message.text)

    page.on("console", on_message)
    page.on("pageerror", lambda error: on_console(str(error)))
    page.goto(address, wait_until="load")
    page.evaluate(
        "document.querySelectorAll('img[loading=lazy]').forEach(i => i.loading = 'eager')"
    )
    page.wait_for_function("[...document.images].every(i => i.complete)")
    return page.evaluate(MEASURE, LEAST_CONTRAST), errors


def faults_of(name, view, found, errors):
    """Return what is wrong with a page, in words."""
    faults = [f"text hardly stands out: {what}" for what in found["faint"]]
    if view == "dark":
        faults += [f"picture is not dark: {source}" for source in found["bright"]]
    if view == "desk" and found["height"] > HIGHEST and not name.startswith("generated/"):
        faults.append(f"is {found['height']} pixels high")
    if view == "desk":
        faults += [f"code is cut: {line}" for line in found["cut"]]
    if found["overflow"] > 1:
        faults.append(f"scrolls sideways by {found['overflow']} pixels: {found['wide']}")
    faults += [f"missing picture {source}" for source in found["missing"]]
    if not in_order(found["sizes"]):
        faults.append(f"headings are not in order: {found['sizes']}")
    faults += [f"console: {error}" for error in errors]
    return faults


def broken_links(pages, origin):
    """Return a sentence on each link within the site that leads nowhere."""
    faults = []
    for name, found in pages.items():
        for link in sorted(set(found["links"])):
            if not link.startswith(origin):
                continue
            path, _, place = urllib.parse.unquote(link[len(origin) :]).partition("#")
            path = path.lstrip("/").partition("?")[0]
            if path.endswith("/") or not path:
                path += "index.html"
            if path.endswith(".html") and path not in pages:
                faults.append(f"{name}: no page {path}")
            elif place and path in pages and place not in pages[path]["ids"]:
                faults.append(f"{name}: no place {place} on {path}")
    return faults


def main():
    from playwright.sync_api import sync_playwright

    args = arguments()
    handler = functools.partial(Quiet, directory=str(args.site))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    origin = f"http://127.0.0.1:{server.server_address[1]}"
    names = sorted(p.relative_to(args.site).as_posix() for p in args.site.rglob("*.html"))
    names = [n for n in names if not n.startswith("_")]
    faults, pages = [], {}
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=args.browser, args=["--no-sandbox"])
        for view, (width, height, colours) in VIEWS.items():
            size = {"width": width, "height": height}
            context = browser.new_context(viewport=size, color_scheme=colours)
            context.route(lambda url: not url.startswith(origin), lambda route: route.abort())
            for name in names:
                page = context.new_page()
                found, errors = look_at(page, f"{origin}/{name}", origin)
                faults += [f"{name}, {view}: {f}" for f in faults_of(name, view, found, errors)]
                pages[name] = found
                if args.pictures:
                    target = args.pictures / view / name.replace("/", "_")
                    target.parent.mkdir(parents=True, exist_ok=True)
                    page.screenshot(path=str(target.with_suffix(".png")), full_page=True)
                page.close()
        browser.close()
    faults += broken_links(pages, origin)
    for fault in faults:
        print(fault)
    print(f"{len(names)} pages in {len(VIEWS)} views, {len(faults)} faults")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
