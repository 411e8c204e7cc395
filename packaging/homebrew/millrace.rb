# A formula for a tap of your own; docs/install.md says how. It builds from a git checkout, which
# HOMEBREW_MILLRACE_SOURCE names: brew hands on no other variables.
class Millrace < Formula
  desc "LLM inference server on MLX: one engine, every protocol"
  license "Apache-2.0"
  head "file://#{ENV.fetch("HOMEBREW_MILLRACE_SOURCE", Dir.pwd)}", using: :git, branch: "main"

  depends_on arch: :arm64
  depends_on macos: :sonoma
  depends_on "python@3.12"

  def install
    # MLX and most of what it needs come as wheels, for which brew's resources have no place.
    system Formula["python@3.12"].opt_bin/"python3.12", "-m", "venv", libexec
    pip = [libexec/"bin/python", "-m", "pip", "install", "-c", "constraints.txt"]
    system(*pip, "#{buildpath}[vision]")
    system(*pip, "--no-deps", "mlx-vlm")
    bin.install_symlink libexec/"bin/millrace"
    generate_completions_from_executable(bin/"millrace", shells: [:bash, :zsh, :fish],
                                                         shell_parameter_format: :typer)
  end

  service do
    run [opt_bin/"millrace", "serve"]
    keep_alive successful_exit: false
    log_path var/"log/millrace.log"
    error_log_path var/"log/millrace.log"
  end

  test do
    assert_match "Serve models over HTTP", shell_output("#{bin}/millrace serve --help")
  end
end
